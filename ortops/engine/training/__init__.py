"""Running a trainable model: sessions, data, `fit`."""
