"""A leaderboard from results folders: `protocol` decides which results share a table, `boards` builds the tables, and
`checks` tells whether a submission is complete and plausible."""
