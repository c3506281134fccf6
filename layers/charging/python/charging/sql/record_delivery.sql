-- Notes that a consumer has an event, and returns a row only the first time. A second delivery that races
-- the first one waits for it here, and finds the row or, after a rollback, takes its place.
INSERT INTO processed_events (consumer, event_id)
VALUES (%(consumer)s, %(event_id)s)
ON CONFLICT (consumer, event_id) DO NOTHING
RETURNING event_id
