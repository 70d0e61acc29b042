"""KV-cache methods: one file each; a method decides which entries of the full cache a step reads."""
