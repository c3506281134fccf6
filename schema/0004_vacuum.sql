-- Dead rows go before they slow down whoever reads the oldest first.
--
-- Autovacuum waits by default until a fifth of a table is dead. Of tables that keep weeks this is days of dead rows, and
-- each claim of the relay and each purge begins by stepping over them in its index. It also leaves the indexes as they
-- are while fewer than two pages of the table in a hundred hold dead rows, which is just where the claim's are: eight
-- pages of outbox_due more for each thousand events that were published, measured.
ALTER TABLE outbox SET (autovacuum_vacuum_scale_factor = 0.02, vacuum_index_cleanup = on);
ALTER TABLE processed_events SET (autovacuum_vacuum_scale_factor = 0.02, vacuum_index_cleanup = on);
