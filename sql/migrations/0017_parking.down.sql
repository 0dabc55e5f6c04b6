DROP TABLE worker_parked;
