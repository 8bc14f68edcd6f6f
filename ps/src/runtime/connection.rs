//! One connection of a shard: frames in, frames out.

use std::io::IoSliceMut;
use std::rc::Rc;
use std::time::Instant;

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{BodyPoll, FrameReader, Poll};
use tokio::io::Interest;

use super::link::Link;
use super::outbox::Outbox;
use super::shard_thread::{Arrived, Core};
use crate::shard::Input;

/// Frames that one connection reads before the others have their turn.
const TURN: usize = 16;

/// Serves a peer that has said hello, until either side is done.
pub(super) async fn serve(core: Rc<Core>, arrived: Arrived) {
    let Ok(link) = Link::attach(arrived.stream) else {
        return;
    };
    let (connection, outbox) = core.register();
    let (hello, header) = (&arrived.hello, &arrived.header);
    core.handle(Input::Connected { connection, hello, header, way: arrived.way });
    let mut reader = arrived.reader;
    reader.open();
    let mut conversation =
        Conversation { core: &core, connection, link, outbox, reader, in_body: false };
    match conversation.run().await {
        // The peer or its machine is gone: its business.
        Ok(()) | Err(ReadError::Io(_)) => {}
        Err(_) => core.fault(),
    }
    drop(conversation);
    core.forget(connection);
}

struct Conversation<'a> {
    core: &'a Core,
    connection: u64,
    link: Link,
    outbox: Rc<Outbox>,
    reader: FrameReader,
    /// A body is being received.
    in_body: bool,
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
            self.outbox.flush(&self.link, |answer| self.core.answered(answer))?;
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
                self.outbox.flush(&self.link, |answer| self.core.answered(answer))?;
            }
            let writes = !self.outbox.is_idle();
            let interest = match (reads, writes) {
                (true, true) => Interest::READABLE | Interest::WRITABLE,
                (_, true) => Interest::WRITABLE,
                _ => Interest::READABLE,
            };
            self.core.wait_for_peers(writes || self.is_half());
            tokio::select! {
                biased;
                ready = self.link.ready(interest) => {
                    ready?;
                    self.core.peer_goes_on();
                }
                () = self.outbox.notify.notified() => {}
            }
        }
    }

    fn read_turn(&mut self) -> Result<Turn, ReadError> {
        let before = self.reader.bytes();
        let turn = self.read_frames();
        // A frame that is half here must get on; one that is not begun may take its time.
        let half = self.is_half();
        let progress = self.reader.bytes() != before;
        match (half, self.outbox.half_since.get()) {
            (false, _) => self.outbox.half_since.set(None),
            (true, Some(_)) if !progress => {}
            (true, _) => self.outbox.half_since.set(Some(Instant::now())),
        }
        turn
    }

    /// Whether a frame is here in part.
    fn is_half(&self) -> bool {
        self.in_body || self.reader.has_begun()
    }

    fn read_frames(&mut self) -> Result<Turn, ReadError> {
        for _ in 0..TURN {
            if self.in_body {
                if self.read_body()? == BodyPoll::Pending {
                    return Ok(Turn::Blocked);
                }
                continue;
            }
            // All that has come is answered: whoever waits for that need not wait for us to find out that
            // nothing else has.
            if !self.outbox.is_idle() && !self.reader.has_begun() {
                self.outbox.flush(&self.link, |answer| self.core.answered(answer))?;
            }
            let link = &self.link;
            let mut source = |slices: &mut [IoSliceMut<'_>]| link.try_read(slices);
            match self.reader.poll(&mut source)? {
                Poll::Pending => return Ok(Turn::Blocked),
                Poll::Closed => return Ok(Turn::Closed),
                Poll::Frame(header, message) => {
                    self.in_body = header.body_bytes > 0;
                    let (connection, header) = (self.connection, &header);
                    self.core.handle(Input::Message { connection, header, message });
                }
            }
            if self.outbox.is_full() || self.outbox.closing.get() {
                return Ok(Turn::Over);
            }
        }
        Ok(Turn::Over)
    }

    fn read_body(&mut self) -> Result<BodyPoll, ReadError> {
        let (connection, link, reader) = (self.connection, &self.link, &mut self.reader);
        let before = reader.bytes();
        let mut source = |slices: &mut [IoSliceMut<'_>]| link.try_read(slices);
        let poll = self.core.with_body(connection, |target| match target {
            Some(target) => reader.poll_body(&mut source, target),
            None => reader.skip_body(&mut source),
        })?;
        match poll {
            BodyPoll::Done => {
                self.in_body = false;
                self.core.handle(Input::Body { connection });
            }
            BodyPoll::Pending if reader.bytes() != before => {
                self.core.handle(Input::Progress { connection });
            }
            BodyPoll::Pending => {}
        }
        Ok(poll)
    }
}
