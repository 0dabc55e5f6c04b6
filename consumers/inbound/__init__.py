"""Writing down what a delivery said: contacts, contact events, orders, messages, and the domain events of all that."""
