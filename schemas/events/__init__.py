"""The payload of each event type as a pydantic model, one module per family."""
