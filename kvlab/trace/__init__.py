"""What happened: events with their times, kept, folded and replayed."""
