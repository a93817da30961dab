"""Observers that `main` hands to the other rooms: metrics and spans. Nothing below imports them."""
