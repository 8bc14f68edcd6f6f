//! The task of one connection of a shard: it reads requests and writes answers.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Instant;

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{FrameEvent, FrameReader, FrameSink};
use pushpull_net::{ArrivedPeer, ConnectionPhase, ConnectionSide, FrameStream, Stream};
use tokio::sync::Notify;

use super::outbox::Outbox;
use super::shard_thread::ShardCore;
use crate::shard::ShardInput;

/// Serves a peer that has said hello until either side closes the connection.
pub(super) async fn serve(core: Rc<ShardCore>, arrived: ArrivedPeer) {
    let Ok(stream) = Stream::attach(arrived.stream) else {
        return;
    };
    let (connection, outbox) = core.register();
    let registration = ConnectionRegistration { core: core.clone(), connection };
    let (hello, header) = (&arrived.hello, &arrived.header);
    core.handle(ShardInput::Connected { connection, hello, header, origin: arrived.origin });
    #[cfg(test)]
    tests::panic_if_asked(hello);
    let mut frames = FrameStream::new(stream, arrived.reader);
    frames.open();
    let mut side = ServerSide { core: &core, connection, outbox, bytes: 0 };
    match frames.serve(&mut side, drop).await {
        // The peer closed the socket or its machine is gone: no fault of the connection.
        Ok(()) | Err(ReadError::Io(_)) => {}
        Err(_) => core.fault(),
    }
    drop((frames, registration));
}

/// The registration of a connection with the shard. Dropping it frees the connection's slot, even
/// if the task panics.
struct ConnectionRegistration {
    core: Rc<ShardCore>,
    connection: u64,
}

impl Drop for ConnectionRegistration {
    fn drop(&mut self) {
        let forget = || self.core.forget(self.connection);
        if !std::thread::panicking() {
            return forget();
        }
        self.core.fault();
        // A second panic during unwinding would abort the process. The first has been reported
        // already.
        let _ = catch_unwind(AssertUnwindSafe(forget));
    }
}

/// The server's side of a connection.
struct ServerSide<'a> {
    core: &'a ShardCore,
    connection: u64,
    outbox: Rc<Outbox>,
    /// The bytes received before the last batch of reads ended.
    bytes: u64,
}

impl FrameSink for ServerSide<'_> {
    fn on_frame(&mut self, event: FrameEvent<'_>) {
        self.core.handle(ShardInput::of_frame(self.connection, event));
    }

    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
        self.core.with_body(self.connection, receive)
    }
}

impl ConnectionSide for ServerSide<'_> {
    fn flush(&mut self, stream: &Stream) -> io::Result<bool> {
        self.outbox.flush(stream, |answer| self.core.answered(answer))
    }

    fn phase(&self) -> ConnectionPhase {
        self.outbox.phase()
    }

    fn changed(&self) -> &Notify {
        &self.outbox.notify
    }

    fn batch_received(&mut self, reader: &FrameReader) {
        // A partly received frame must make progress; between frames the peer may be idle.
        let progress = std::mem::replace(&mut self.bytes, reader.bytes()) != reader.bytes();
        match (reader.has_begun(), self.outbox.partial_since.get()) {
            (false, _) => self.outbox.partial_since.set(None),
            (true, Some(_)) if !progress => {}
            (true, _) => self.outbox.partial_since.set(Some(Instant::now())),
        }
    }

    fn wait_begins(&mut self, rest: bool) {
        self.core.polling().wait_begins(rest);
    }

    fn socket_ready(&mut self) {
        self.core.polling().socket_ready();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSliceMut, Read, Write};
    use std::net::TcpStream;
    use std::time::Duration;

    use pushpull_common::cluster::ClusterSpec;
    use pushpull_common::identity::Identity;
    use pushpull_common::ids::{
        ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId,
    };
    use pushpull_common::protocol::message::{BodyCrc, Hello, Role};
    use pushpull_common::protocol::wire::{List, Text};
    use pushpull_common::protocol::{BodyStamp, Envelope, Message, Poll, Refusal, encode, version};
    use pushpull_optim::optimizer::Sgd;

    use super::*;
    use crate::config::{Network, PsConfig};
    use crate::runtime::Ps;

    /// A connection of this job panics once it is registered with the shard.
    const PANICS: &str = "panics";

    /// Limit on every wait.
    const WAIT_LIMIT: Duration = Duration::from_secs(30);

    pub(super) fn panic_if_asked(hello: &Hello) {
        assert_ne!(hello.job.as_str(), PANICS, "the test requests a panic");
    }

    /// Sends a hello of this job and returns the answer; `None` if the connection is closed.
    fn greet(address: &str, job: &str) -> Option<Message> {
        let hello = Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: Role::Reader {},
            job: Text::clipped(job),
            task: 0,
            shard: ShardId { task: 0, shard: 0 },
            incarnation: Incarnation(1),
            client_epoch: ClientEpoch(0),
            seen_epoch: RestoreEpoch(0),
            seen_step: GlobalStep(0),
            catalogue: None,
            body_crc: BodyCrc::Off {},
            identity: Identity::new().to_wire(),
            auth: List::default(),
        };
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(WAIT_LIMIT)).unwrap();
        let mut frame = Vec::new();
        encode(&mut frame, &Envelope::default(), &hello.into(), BodyStamp::NONE);
        stream.write_all(&frame).unwrap();
        let mut reader = FrameReader::new();
        let mut source = |slices: &mut [IoSliceMut<'_>]| stream.read_vectored(slices);
        match reader.poll(&mut source) {
            Ok(Poll::Frame(_, message)) => Some(message),
            Ok(Poll::Closed) | Err(ReadError::Io(_)) => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_panicking_connection_task_frees_its_slot() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = runtime.block_on(Ps::listen("127.0.0.1:0")).unwrap();
        let cluster = ClusterSpec::builder().job("ps", [listener.address()]).build().unwrap();
        let config = PsConfig::new(cluster, TaskId::ps(0), Sgd::new(1.0))
            .network(Network::default().connections_max(1));
        let ps = listener.start(config).unwrap();
        let handle = ps.handle();
        let address = handle.address().to_owned();
        for _ in 0..3 {
            assert_eq!(greet(&address, PANICS), None);
            // The socket is closed a moment before the slot is free.
            let begun = Instant::now();
            loop {
                match greet(&address, "worker") {
                    Some(Message::Welcome(_)) => break,
                    Some(Message::Refused(refused)) => {
                        let busy = matches!(refused.refusal, Refusal::Busy { .. });
                        assert!(busy && begun.elapsed() < WAIT_LIMIT, "{}", refused.refusal);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(handle.metrics().connections_faulted, 3);
        handle.stop();
        runtime.block_on(ps.serve(std::future::pending())).unwrap();
    }
}
