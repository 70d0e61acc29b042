"""One module per figure: `draw(rows, results, figure)` from stored rows only. `render.plot_run` writes the files."""
