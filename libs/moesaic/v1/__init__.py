"""Generated stubs of protos/moesaic/v1; made by ``make proto``."""
