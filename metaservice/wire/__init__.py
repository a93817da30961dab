"""What travels between service and clients: schemas and problem codes. Light, shared by `api` and `client`."""
