-- The events that are known to be missing, up to a limit, in the order of their places. Reads the table by its primary
-- key; locks and writes nothing.
SELECT event_type, aggregate_id, sequence, found_at
FROM missing_events
ORDER BY aggregate_id, sequence
LIMIT %(limit)s
