"""The tables of the papers as LaTeX: templates, transcribed figures, and the code that fills them from records."""
