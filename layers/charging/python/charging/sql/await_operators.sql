-- Lets one operator change the outbox at a time, to the end of the transaction: each finds what the one before has left,
-- and a redrive begins where the one before ends. Waits as long as lock_timeout says. A transaction's lock, which does
-- not pin a connection of RDS Proxy.
SELECT pg_advisory_xact_lock(hashtextextended('operators', 0))
