//! One connection to a shard: from connecting to its end.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::rc::Rc;
use std::time::Duration;

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{BodyPoll, FrameReader, Poll};
use tokio::io::Interest;
use tokio::sync::Notify;

use super::link::Link;
use super::thread::Core;
use crate::parts::Body;
use crate::session::Input;

/// How long the transport may take to connect, before the next attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Frames that one connection reads before the others have their turn.
const TURN: usize = 16;

/// A frame to send.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) head: Vec<u8>,
    pub(super) body: Body,
}

/// The sending side of one connection, shared between its task and the session's outputs.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    queue: RefCell<VecDeque<Frame>>,
    sent: Cell<usize>,
    /// The link takes no more until the peer reads.
    full: Cell<bool>,
    notify: Notify,
    /// The session has given the connection up: it ends without a word.
    given_up: Cell<bool>,
}

impl Outbox {
    pub(super) fn push(&self, frame: Frame) {
        self.queue.borrow_mut().push_back(frame);
        self.notify.notify_one();
    }

    pub(super) fn give_up(&self) {
        self.given_up.set(true);
        self.notify.notify_one();
    }

    fn is_empty(&self) -> bool {
        self.queue.borrow().is_empty()
    }

    /// Sends as much as the link takes. Whether it took something after it had been full: then the
    /// peer has read. That a link which is not full takes something says nothing about the peer.
    fn flush(&self, link: &Link) -> io::Result<bool> {
        let mut queue = self.queue.borrow_mut();
        let mut drained = false;
        while let Some(front) = queue.front() {
            let head = std::iter::once(&front.head[..]);
            let mut slices: Vec<IoSlice<'_>> =
                head.chain(front.body.slices()).map(IoSlice::new).collect();
            let total: usize = slices.iter().map(|slice| slice.len()).sum();
            let mut rest = &mut slices[..];
            IoSlice::advance_slices(&mut rest, self.sent.get());
            // A frame of many small stretches goes out in several writes.
            let count = rest.len().min(SLICES_MAX);
            match link.try_write(&rest[..count]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.sent.set(self.sent.get() + count);
                    drained |= self.full.replace(false);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.full.set(true);
                    return Ok(drained);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if self.sent.get() == total {
                self.sent.set(0);
                queue.pop_front();
            }
        }
        Ok(drained)
    }
}

/// How many slices one write is given; the system takes at most 1024.
const SLICES_MAX: usize = 512;

/// Connects, and converses until the connection ends; then tells the session, unless the session
/// has given it up.
pub(super) async fn run(core: Rc<Core>, link: usize, address: String, outbox: Rc<Outbox>) {
    let error = match tokio::time::timeout(CONNECT_TIMEOUT, Link::connect(&address)).await {
        Err(_) => format!("no connection within {CONNECT_TIMEOUT:?}"),
        Ok(Err(error)) => error.to_string(),
        Ok(Ok(stream)) => match converse(&core, link, &stream, &outbox).await {
            Ok(()) => "the server has closed the connection".to_owned(),
            Err(error) => error.to_string(),
        },
    };
    if !outbox.given_up.get() {
        core.handle(Input::Disconnected { link, error });
    }
}

async fn converse(
    core: &Core,
    link: usize,
    stream: &Link,
    outbox: &Outbox,
) -> Result<(), ReadError> {
    let mut reader = FrameReader::new();
    // The server was chosen by the configuration: its metas may be of any length.
    reader.open();
    let mut in_body = false;
    if !outbox.given_up.get() {
        core.handle(Input::Connected { link });
    }
    loop {
        if outbox.flush(stream)? {
            core.handle(Input::Written { link });
        }
        match read_turn(core, link, stream, outbox, &mut reader, &mut in_body)? {
            Turn::Closed => return Ok(()),
            Turn::Over => {
                tokio::task::yield_now().await;
                continue;
            }
            Turn::Blocked => {}
        }
        // What was read may have led to something to send.
        if outbox.flush(stream)? {
            core.handle(Input::Written { link });
        }
        if outbox.given_up.get() {
            return Ok(());
        }
        let interest = match outbox.is_empty() {
            true => Interest::READABLE,
            false => Interest::READABLE | Interest::WRITABLE,
        };
        tokio::select! {
            biased;
            ready = stream.ready(interest) => { ready?; }
            () = outbox.notify.notified() => {}
        }
    }
}

/// Why a turn of reading ended.
enum Turn {
    /// Nothing more is there.
    Blocked,
    /// The others are to have their turn.
    Over,
    /// The peer has closed the stream.
    Closed,
}

fn read_turn(
    core: &Core,
    link: usize,
    stream: &Link,
    outbox: &Outbox,
    reader: &mut FrameReader,
    in_body: &mut bool,
) -> Result<Turn, ReadError> {
    let mut source = |slices: &mut [IoSliceMut<'_>]| stream.try_read(slices);
    for _ in 0..TURN {
        if outbox.given_up.get() {
            return Ok(Turn::Blocked);
        }
        if *in_body {
            let before = reader.bytes();
            let poll = core.with_body(link, |targets| match targets {
                Some(targets) => reader.poll_body_scattered(&mut source, targets),
                None => reader.skip_body(&mut source),
            })?;
            match poll {
                BodyPoll::Done => {
                    *in_body = false;
                    core.handle(Input::Body { link });
                }
                BodyPoll::Pending => {
                    if reader.bytes() != before {
                        core.handle(Input::Heard { link });
                    }
                    return Ok(Turn::Blocked);
                }
            }
            continue;
        }
        match reader.poll(&mut source)? {
            Poll::Pending => return Ok(Turn::Blocked),
            Poll::Closed => return Ok(Turn::Closed),
            Poll::Frame(header, message) => {
                *in_body = header.body_bytes > 0;
                core.handle(Input::Message { link, header, message });
            }
        }
    }
    Ok(Turn::Over)
}
