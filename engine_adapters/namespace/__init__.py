"""Which engines may share blocks: the full description of what makes KV bytes what they are."""
