"""For how long can one body hold the gateway's event loop?"""
