"""One claim per file: what the paper says, what is measured, the predicates with their regions and reasons."""
