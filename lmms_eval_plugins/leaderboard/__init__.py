"""A leaderboard from results folders: `protocol` says what may stand in one table, `boards` makes the tables, `checks`
says whether a submission is complete and plausible."""
