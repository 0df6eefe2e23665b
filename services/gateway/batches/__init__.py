"""Files and batches: where they are kept, and how batches are carried out."""
