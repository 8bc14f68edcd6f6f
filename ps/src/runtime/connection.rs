//! One connection of a shard: frames in, frames out.

use std::io::IoSliceMut;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Instant;

use pushpull_common::protocol::decode::ReadError;
use pushpull_net::Stream;
use tokio::io::Interest;

use super::outbox::Outbox;
use super::shard_thread::{Arrived, Core};
use crate::shard::ShardInput;
use crate::shard::frames::{FrameProgress, FrameReceiver};

/// Frames that one connection reads before the others have their turn.
const TURN: usize = 16;

/// Serves a peer that has said hello, until either side is done.
pub(super) async fn serve(core: Rc<Core>, arrived: Arrived) {
    let Ok(stream) = Stream::attach(arrived.stream) else {
        return;
    };
    let (connection, outbox) = core.register();
    let registered = Registered { core: core.clone(), connection };
    let (hello, header) = (&arrived.hello, &arrived.header);
    core.handle(ShardInput::Connected { connection, hello, header, origin: arrived.origin });
    #[cfg(test)]
    tests::panic_if_asked(hello);
    let frames = FrameReceiver::new(connection, arrived.reader);
    let mut conversation = Conversation { core: &core, stream, outbox, frames };
    match conversation.run().await {
        // The peer or its machine is gone: its business.
        Ok(()) | Err(ReadError::Io(_)) => {}
        Err(_) => core.fault(),
    }
    drop((conversation, registered));
}

/// A connection that the shard knows of. However its task ends, its slot comes free.
struct Registered {
    core: Rc<Core>,
    connection: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let forget = || self.core.forget(self.connection);
        if !std::thread::panicking() {
            return forget();
        }
        self.core.fault();
        // A second panic on the way out would end the process. The first has been told already.
        let _ = catch_unwind(AssertUnwindSafe(forget));
    }
}

struct Conversation<'a> {
    core: &'a Core,
    stream: Stream,
    outbox: Rc<Outbox>,
    frames: FrameReceiver,
}

/// Why a turn of reading ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Nothing more is there.
    Blocked,
    /// The others are to have their turn.
    Over,
    /// The peer has closed the stream.
    Closed,
}

impl Conversation<'_> {
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
                match self.read_turn()? {
                    Turn::Closed => return Ok(()),
                    Turn::Over => {
                        tokio::task::yield_now().await;
                        continue;
                    }
                    Turn::Blocked => {}
                }
                // What was read may have been answered, or have made the shard close us.
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
                    self.core.peer_goes_on();
                }
                () = self.outbox.notify.notified() => {}
            }
        }
    }

    fn read_turn(&mut self) -> Result<Turn, ReadError> {
        let before = self.frames.bytes();
        let turn = self.read_frames();
        // A frame that is half here must get on; one that is not begun may take its time.
        let half = self.frames.has_begun();
        let progress = self.frames.bytes() != before;
        match (half, self.outbox.half_since.get()) {
            (false, _) => self.outbox.half_since.set(None),
            (true, Some(_)) if !progress => {}
            (true, _) => self.outbox.half_since.set(Some(Instant::now())),
        }
        turn
    }

    fn read_frames(&mut self) -> Result<Turn, ReadError> {
        let mut core = self.core;
        for _ in 0..TURN {
            // All that has come is answered: whoever waits for that need not wait for us to find out that
            // nothing else has.
            if !self.outbox.is_idle() && !self.frames.has_begun() {
                self.outbox.flush(&self.stream, |answer| self.core.answered(answer))?;
            }
            let stream = &self.stream;
            let mut source = |slices: &mut [IoSliceMut<'_>]| stream.try_read(slices, drop);
            match self.frames.next(&mut source, &mut core)? {
                FrameProgress::Blocked => return Ok(Turn::Blocked),
                FrameProgress::Closed => return Ok(Turn::Closed),
                FrameProgress::Whole => {}
            }
            if self.outbox.is_full() || self.outbox.closing.get() {
                return Ok(Turn::Over);
            }
        }
        Ok(Turn::Over)
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

    use super::*;
    use crate::config::PsConfig;
    use crate::optimizer::Sgd;
    use crate::runtime::Ps;

    /// The task of a connection of this job panics once the shard has been told of it.
    const PANICS: &str = "panics";

    /// By when something must have happened.
    const SOON: Duration = Duration::from_secs(30);

    pub(super) fn panic_if_asked(hello: &Hello) {
        assert_ne!(hello.job.as_str(), PANICS, "a test asks for it");
    }

    /// What a hello of this job is answered; nothing if the connection is closed.
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
        stream.set_read_timeout(Some(SOON)).unwrap();
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
    fn a_connection_whose_task_panics_gives_its_slot_back() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = runtime.block_on(Ps::listen("127.0.0.1:0")).unwrap();
        let cluster = ClusterSpec::builder().job("ps", [listener.address()]).build().unwrap();
        let config = PsConfig::new(cluster, TaskId::ps(0), Sgd::new(1.0)).connections_max(1);
        let ps = listener.start(config).unwrap();
        let handle = ps.handle();
        let address = handle.address().to_owned();
        for _ in 0..3 {
            assert_eq!(greet(&address, PANICS), None);
            // Its socket is closed a moment before its slot is free.
            let begun = Instant::now();
            loop {
                match greet(&address, "worker") {
                    Some(Message::Welcome(_)) => break,
                    Some(Message::Refused(refused)) => {
                        let busy = matches!(refused.refusal, Refusal::Busy { .. });
                        assert!(busy && begun.elapsed() < SOON, "{}", refused.refusal);
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
