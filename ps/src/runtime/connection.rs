//! The task of one connection of a shard: it reads requests and writes answers.

use std::io::IoSliceMut;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Instant;

use pushpull_common::protocol::decode::ReadError;
use pushpull_net::Stream;
use tokio::io::Interest;

use super::outbox::Outbox;
use super::shard_thread::{ArrivedPeer, ShardCore};
use crate::shard::ShardInput;
use crate::shard::frames::{FrameProgress, FrameReceiver};

/// The most frames that one connection reads before it yields to the others.
const FRAMES_PER_BATCH: usize = 16;

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
    let frames = FrameReceiver::new(connection, arrived.reader);
    let mut task = ConnectionTask { core: &core, stream, outbox, frames };
    match task.run().await {
        // The peer closed the socket or its machine is gone: no fault of the connection.
        Ok(()) | Err(ReadError::Io(_)) => {}
        Err(_) => core.fault(),
    }
    drop((task, registration));
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

struct ConnectionTask<'a> {
    core: &'a ShardCore,
    stream: Stream,
    outbox: Rc<Outbox>,
    frames: FrameReceiver,
}

/// Why a batch of reads ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadOutcome {
    /// The socket has no more bytes.
    Blocked,
    /// The other connections are to run first.
    Yield,
    /// The peer has closed the stream.
    Closed,
}

impl ConnectionTask<'_> {
    async fn run(&mut self) -> Result<(), ReadError> {
        loop {
            if self.outbox.broken.get() {
                return Ok(());
            }
            self.outbox.flush(&self.stream, |answer| self.core.answered(answer))?;
            let closing = self.outbox.closing.get();
            if closing && self.outbox.is_idle() {
                return Ok(());
            }
            let reads = !closing && !self.outbox.is_full();
            if reads {
                match self.read_batch()? {
                    ReadOutcome::Closed => return Ok(()),
                    ReadOutcome::Yield => {
                        tokio::task::yield_now().await;
                        continue;
                    }
                    ReadOutcome::Blocked => {}
                }
                // The frames just read may have been answered, or may have made the shard close the
                // connection.
                self.outbox.flush(&self.stream, |answer| self.core.answered(answer))?;
            }
            let writes = !self.outbox.is_idle();
            let interest = match (reads, writes) {
                (true, true) => Interest::READABLE | Interest::WRITABLE,
                (_, true) => Interest::WRITABLE,
                _ => Interest::READABLE,
            };
            self.core.wait_for_peers(writes || self.frames.has_begun());
            tokio::select! {
                biased;
                ready = self.stream.ready(interest) => {
                    ready?;
                    self.core.peer_ready();
                }
                () = self.outbox.notify.notified() => {}
            }
        }
    }

    fn read_batch(&mut self) -> Result<ReadOutcome, ReadError> {
        let before = self.frames.bytes();
        let outcome = self.read_frames();
        // A partly received frame must make progress; between frames the peer may be idle.
        let is_partial = self.frames.has_begun();
        let progress = self.frames.bytes() != before;
        match (is_partial, self.outbox.partial_since.get()) {
            (false, _) => self.outbox.partial_since.set(None),
            (true, Some(_)) if !progress => {}
            (true, _) => self.outbox.partial_since.set(Some(Instant::now())),
        }
        outcome
    }

    fn read_frames(&mut self) -> Result<ReadOutcome, ReadError> {
        let mut core = self.core;
        for _ in 0..FRAMES_PER_BATCH {
            // Every received request is answered: send the answers before a read that may only
            // return `WouldBlock`.
            if !self.outbox.is_idle() && !self.frames.has_begun() {
                self.outbox.flush(&self.stream, |answer| self.core.answered(answer))?;
            }
            let stream = &self.stream;
            let mut source = |slices: &mut [IoSliceMut<'_>]| stream.try_read(slices, drop);
            match self.frames.next(&mut source, &mut core)? {
                FrameProgress::Blocked => return Ok(ReadOutcome::Blocked),
                FrameProgress::Closed => return Ok(ReadOutcome::Closed),
                FrameProgress::Whole => {}
            }
            if self.outbox.is_full() || self.outbox.closing.get() {
                return Ok(ReadOutcome::Yield);
            }
        }
        Ok(ReadOutcome::Yield)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::time::Duration;

    use pushpull_common::cluster::ClusterSpec;
    use pushpull_common::identity::Identity;
    use pushpull_common::ids::{
        ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId,
    };
    use pushpull_common::protocol::decode::{FrameReader, Poll};
    use pushpull_common::protocol::message::{BodyCrc, Hello, Role};
    use pushpull_common::protocol::wire::{List, Text};
    use pushpull_common::protocol::{BodyStamp, Envelope, Message, Refusal, encode, version};
    use pushpull_optim::optimizer::Sgd;

    use super::*;
    use crate::config::PsConfig;
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
        let config = PsConfig::new(cluster, TaskId::ps(0), Sgd::new(1.0)).connections_max(1);
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
