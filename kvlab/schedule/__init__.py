"""Who runs next: from waiting and running requests to the ids of the next step. Knows no torch."""
