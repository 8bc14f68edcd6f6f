//! Runs one connection to a shard, from connecting to closing.

use std::io::IoSliceMut;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{BodyPoll, FrameReader, Poll};
use pushpull_net::Stream;
use tokio::io::Interest;

use super::outbox::LinkOutbox;
use super::thread::SessionCore;
use crate::session::SessionInput;

/// The limit on one attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The frames that one connection reads before it yields to the others.
const FRAMES_PER_ROUND: usize = 16;

/// Connects and exchanges frames until the connection ends. Then reports the end to the session,
/// unless the session has given the connection up.
pub(super) async fn run(
    core: Arc<SessionCore>,
    link: usize,
    address: String,
    outbox: Arc<LinkOutbox>,
) {
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
    core: &SessionCore,
    link: usize,
    stream: &Stream,
    outbox: &LinkOutbox,
) -> Result<(), ReadError> {
    let mut reader = FrameReader::new();
    // The configuration names the server, so it is trusted: its metas may have any length.
    reader.open();
    let mut in_body = false;
    if !outbox.is_given_up() {
        core.handle(SessionInput::Connected { link, same_host: stream.passes_descriptors() });
    }
    loop {
        if outbox.flush(stream)? {
            core.handle(SessionInput::BytesSent { link });
        }
        match read_frames(core, link, stream, outbox, &mut reader, &mut in_body)? {
            ReadEnd::Closed => return Ok(()),
            ReadEnd::Yield => {
                tokio::task::yield_now().await;
                continue;
            }
            ReadEnd::Blocked => {}
        }
        // The frames just read may have queued responses.
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

/// Why a round of reads ended.
enum ReadEnd {
    /// The socket has no more data.
    Blocked,
    /// The connection has read its share of frames and yields.
    Yield,
    /// The peer has closed the stream.
    Closed,
}

fn read_frames(
    core: &SessionCore,
    link: usize,
    stream: &Stream,
    outbox: &LinkOutbox,
    reader: &mut FrameReader,
    in_body: &mut bool,
) -> Result<ReadEnd, ReadError> {
    let mut source =
        |slices: &mut [IoSliceMut<'_>]| stream.try_read(slices, |fd| outbox.keep_descriptor(fd));
    for _ in 0..FRAMES_PER_ROUND {
        if outbox.is_given_up() {
            return Ok(ReadEnd::Blocked);
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
                    return Ok(ReadEnd::Blocked);
                }
            }
            continue;
        }
        match reader.poll(&mut source)? {
            Poll::Pending => return Ok(ReadEnd::Blocked),
            Poll::Closed => return Ok(ReadEnd::Closed),
            Poll::Frame(header, message) => {
                *in_body = header.body_bytes > 0;
                core.handle(SessionInput::Message { link, header, message });
            }
        }
    }
    Ok(ReadEnd::Yield)
}
