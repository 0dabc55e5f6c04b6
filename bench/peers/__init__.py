"""The peers' own programs; worker_peers.py builds and starts them."""
