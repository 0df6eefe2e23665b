"""A burst of twice the requests, without brownout, with the paper's control of it, and with the whole ladder."""
