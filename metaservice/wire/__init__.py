"""What travels between service and clients: schemas and problem codes. Shared by `api` and `client`."""
