"""Views of a finished run: console card, HTML, standard formats."""
