//! One connection of a shard: frames in, frames out.

use std::io::IoSliceMut;
use std::rc::Rc;
use std::time::Instant;

use pushpull_common::protocol::decode::ReadError;
use tokio::io::Interest;

use super::link::Link;
use super::outbox::Outbox;
use super::shard_thread::{Arrived, Core};
use crate::shard::Input;
use crate::shard::frames::{Came, Frames};

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
    let frames = Frames::new(connection, arrived.reader);
    let mut conversation = Conversation { core: &core, link, outbox, frames };
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
    link: Link,
    outbox: Rc<Outbox>,
    frames: Frames,
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
            self.core.wait_for_peers(writes || self.frames.has_begun());
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
                self.outbox.flush(&self.link, |answer| self.core.answered(answer))?;
            }
            let link = &self.link;
            let mut source = |slices: &mut [IoSliceMut<'_>]| link.try_read(slices);
            match self.frames.next(&mut source, &mut core)? {
                Came::Blocked => return Ok(Turn::Blocked),
                Came::Closed => return Ok(Turn::Closed),
                Came::Whole => {}
            }
            if self.outbox.is_full() || self.outbox.closing.get() {
                return Ok(Turn::Over);
            }
        }
        Ok(Turn::Over)
    }
}
