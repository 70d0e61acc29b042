"""One module per table: a pure function from stored rows and the transcription to what its template prints."""
