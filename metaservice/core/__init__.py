"""The deterministic core: `decide` and `apply` over the state. Knows no clock, chance, I/O or other room."""
