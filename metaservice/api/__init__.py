"""The HTTP face of a replica: guards, decode, command, reply. No business rule lives here."""
