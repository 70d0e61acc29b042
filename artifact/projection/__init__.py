"""Projection methods: one file each; a method decides which input channels of a projection a step reads."""
