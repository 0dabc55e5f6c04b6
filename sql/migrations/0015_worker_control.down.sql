DROP TABLE worker_periodic;
DROP TABLE worker_control;
