"""Messages of the stream as bytes, and back."""
