import com.zaxxer.hikari.HikariConfig;
import com.zaxxer.hikari.HikariDataSource;
import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelConsumerOptions.ProcessingOrder;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import java.io.File;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.DecoderFactory;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * Confluent's Parallel Consumer, ordered by key: a call of 20 ms for each record, PEER_IN_FLIGHT at once, then its
 * idempotency and effect rows by one statement, which is its own transaction and one round trip.
 */
public final class ParallelPeer {
    private static final int FRAMING_BYTES = 5;
    private static final long CALL_MS = 20;
    private static final int CONNECTIONS = 8;
    private static final String WRITE =
            "WITH fresh AS (INSERT INTO bench_inbox (worker, event_id) VALUES ('parallel', ?::uuid)"
                    + " ON CONFLICT DO NOTHING RETURNING event_id)"
                    + " INSERT INTO bench_effect (event_id, organization_id, contact_id, body)"
                    + " SELECT event_id, ?::uuid, ?, ? FROM fresh";

    public static void main(String[] arguments) throws Exception {
        Map<String, String> given = System.getenv();
        HikariConfig pool = new HikariConfig();
        pool.setJdbcUrl(given.get("PEER_JDBC_URL"));
        pool.setUsername(given.get("PEER_DATABASE_USER"));
        pool.setPassword(given.get("PEER_DATABASE_PASSWORD"));
        pool.setMaximumPoolSize(CONNECTIONS);
        HikariDataSource source = new HikariDataSource(pool);
        Schema schema = new Schema.Parser().parse(new File(given.get("PEER_SCHEMA")));
        ThreadLocal<GenericDatumReader<GenericRecord>> readers =
                ThreadLocal.withInitial(() -> new GenericDatumReader<>(schema));

        var consumer =
                new KafkaConsumer<>(
                        Map.<String, Object>of(
                                ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, given.get("PEER_BOOTSTRAP_SERVERS"),
                                ConsumerConfig.GROUP_ID_CONFIG, given.get("PEER_GROUP"),
                                ConsumerConfig.AUTO_OFFSET_RESET_CONFIG, "earliest",
                                ConsumerConfig.ISOLATION_LEVEL_CONFIG, "read_committed",
                                ConsumerConfig.ENABLE_AUTO_COMMIT_CONFIG, false),
                        new StringDeserializer(),
                        new ByteArrayDeserializer());
        var processor =
                ParallelStreamProcessor.<String, byte[]>createEosStreamProcessor(
                        ParallelConsumerOptions.<String, byte[]>builder()
                                .ordering(ProcessingOrder.KEY)
                                .maxConcurrency(Integer.parseInt(given.get("PEER_IN_FLIGHT")))
                                .consumer(consumer)
                                .build());
        processor.subscribe(List.of(given.get("PEER_TOPIC")), new Ready());
        CountDownLatch ended = new CountDownLatch(1);
        Runtime.getRuntime()
                .addShutdownHook(
                        new Thread(
                                () -> {
                                    processor.closeDrainFirst();
                                    source.close();
                                    ended.countDown();
                                }));
        processor.poll(
                context -> {
                    GenericRecord event = decode(readers.get(), context.value());
                    call();
                    write(source, event);
                });
        ended.await();
    }

    private static GenericRecord decode(GenericDatumReader<GenericRecord> reader, byte[] value) {
        try {
            var decoder = DecoderFactory.get().binaryDecoder(value, FRAMING_BYTES, value.length - FRAMING_BYTES, null);
            return reader.read(null, decoder);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static void call() {
        try {
            Thread.sleep(CALL_MS);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    private static void write(HikariDataSource source, GenericRecord event) {
        GenericRecord payload = (GenericRecord) event.get("payload");
        try (Connection connection = source.getConnection();
                PreparedStatement statement = connection.prepareStatement(WRITE)) {
            statement.setString(1, event.get("id").toString());
            statement.setString(2, event.get("organization_id").toString());
            statement.setString(3, payload.get("contact_id").toString());
            statement.setString(4, payload.get("body").toString());
            statement.executeUpdate();
        } catch (SQLException error) {
            throw new IllegalStateException(error);
        }
    }

    /** Says once that there are partitions. */
    private static final class Ready implements ConsumerRebalanceListener {
        private final AtomicBoolean said = new AtomicBoolean();

        @Override
        public void onPartitionsRevoked(Collection<TopicPartition> partitions) {}

        @Override
        public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
            if (!partitions.isEmpty() && said.compareAndSet(false, true)) {
                Instant now = Instant.now().truncatedTo(ChronoUnit.MILLIS);
                System.out.println("{\"event\": \"peer.ready\", \"timestamp\": \"" + now + "\"}");
            }
        }
    }
}
