"""Long-context tasks: those of RULER made locally from the evaluation text, and a reader of LongBench."""
