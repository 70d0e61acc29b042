"""From stored rows to numbers: levels, crossings, gains, matched quality. Pure: reads rows, measures nothing."""
