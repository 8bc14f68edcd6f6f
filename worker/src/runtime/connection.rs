//! One connection to a shard: from connecting to its end.

use std::io::IoSliceMut;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{BodyPoll, FrameReader, Poll};
use pushpull_net::Stream;
use tokio::io::Interest;

use super::outbox::Outbox;
use super::thread::Core;
use crate::session::SessionInput;

/// How long the transport may take to connect, before the next attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Frames that one connection reads before the others have their turn.
const TURN: usize = 16;

/// Connects, and converses until the connection ends; then tells the session, unless the session
/// has given it up.
pub(super) async fn run(core: Arc<Core>, link: usize, address: String, outbox: Arc<Outbox>) {
    let error = match tokio::time::timeout(CONNECT_TIMEOUT, Stream::connect(&address)).await {
        Err(_) => format!("no connection within {CONNECT_TIMEOUT:?}"),
        Ok(Err(error)) => error.to_string(),
        Ok(Ok(stream)) => match converse(&core, link, &stream, &outbox).await {
            Ok(()) => "the server has closed the connection".to_owned(),
            Err(error) => error.to_string(),
        },
    };
    core.sharing_ended(link, &outbox);
    if !outbox.is_given_up() {
        core.handle(SessionInput::Disconnected { link, error });
    }
}

async fn converse(
    core: &Core,
    link: usize,
    stream: &Stream,
    outbox: &Outbox,
) -> Result<(), ReadError> {
    let mut reader = FrameReader::new();
    // The server was chosen by the configuration: its metas may be of any length.
    reader.open();
    let mut in_body = false;
    if !outbox.is_given_up() {
        core.handle(SessionInput::Connected { link, same_host: stream.passes_descriptors() });
    }
    loop {
        if outbox.flush(stream)? {
            core.handle(SessionInput::BytesSent { link });
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
            core.handle(SessionInput::BytesSent { link });
        }
        if outbox.is_given_up() {
            return Ok(());
        }
        let interest = match outbox.is_empty() {
            true => Interest::READABLE,
            false => Interest::READABLE | Interest::WRITABLE,
        };
        tokio::select! {
            biased;
            ready = stream.ready(interest) => { ready?; }
            () = outbox.changed() => {}
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
    stream: &Stream,
    outbox: &Outbox,
    reader: &mut FrameReader,
    in_body: &mut bool,
) -> Result<Turn, ReadError> {
    let mut source =
        |slices: &mut [IoSliceMut<'_>]| stream.try_read(slices, |fd| outbox.keep_descriptor(fd));
    for _ in 0..TURN {
        if outbox.is_given_up() {
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
                    core.handle(SessionInput::Body { link });
                }
                BodyPoll::Pending => {
                    if reader.bytes() != before {
                        core.handle(SessionInput::BytesReceived { link });
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
                core.handle(SessionInput::Message { link, header, message });
            }
        }
    }
    Ok(Turn::Over)
}
