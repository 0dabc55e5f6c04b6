"""Outgoing HTTP to addresses that tenants choose: signatures, which addresses are allowed, and the client that holds
to both."""
