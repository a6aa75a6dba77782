"""From an assignment to a plan: what each rank holds, and what is edited and sent for its code to run."""
