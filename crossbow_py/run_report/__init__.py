"""What runs did, as one page that reads without a network: curves, decisions, a round's timeline, differences."""
