"""What a schedule takes before it is run: time, memory, and a picture of it."""
