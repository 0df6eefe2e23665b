"""United experts among the others of a process, and promises to rows on their way to expert workers."""
