//! When a server answers again: one reader's pull from each shard, as soon as it is possible.
//!
//! A worker would wait between its attempts, so that many do not come back in one instant. That
//! wait is not the server's, so the probe speaks the protocol itself and tries without a pause.

use std::io::{self, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use pushpull::common::identity::Identity;
use pushpull::common::ids::{ClientEpoch, GlobalStep, Incarnation, RequestId, RestoreEpoch};
use pushpull::common::protocol::decode::ReadError;
use pushpull::common::protocol::message::{BodyCrc, Hello, Pull, Role, Selection};
use pushpull::common::protocol::wire::{List, Text};
use pushpull::common::protocol::{
    BodyPoll, BodyStamp, Envelope, FrameReader, Message, Poll, encode, version,
};
use pushpull::{ClusterSpec, ShardId};

use crate::process::PATIENCE;

/// One attempt: whether the shard has welcomed a reader and answered its pull to the end.
pub(crate) fn answers(cluster: &ClusterSpec, shard: ShardId) -> io::Result<bool> {
    let address = cluster.task_address("ps", shard.task).map_err(io::Error::other)?;
    let mut stream = match address.strip_prefix("unix:") {
        Some(path) => Stream::Unix(UnixStream::connect(path)?),
        None => Stream::Tcp(TcpStream::connect(address)?),
    };
    stream.limit()?;
    let mut reader = FrameReader::new();
    send(&mut stream, 1, hello(cluster, shard).into())?;
    if !matches!(next(&mut reader, &mut stream)?, Message::Welcome(_)) {
        return Ok(false);
    }
    reader.open();
    send(&mut stream, 2, Pull { selection: Selection::All {} }.into())?;
    loop {
        match next(&mut reader, &mut stream)? {
            Message::Pulled(pulled) if pulled.last => return Ok(true),
            Message::Pulled(_) => {}
            _ => return Ok(false),
        }
    }
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// A server that is alive and says nothing does not hold the test up for ever.
    fn limit(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(PATIENCE))
            }
            Stream::Unix(stream) => stream.set_read_timeout(Some(PATIENCE)),
        }
    }

    fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read_vectored(slices),
            Stream::Unix(stream) => stream.read_vectored(slices),
        }
    }
}

fn hello(cluster: &ClusterSpec, shard: ShardId) -> Hello {
    Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role: Role::Reader {},
        job: Text::clipped("probe"),
        task: 0,
        shard,
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_step: GlobalStep(0),
        catalogue: None,
        body_crc: BodyCrc::Off {},
        identity: Identity::new().with("ps", cluster.ps_identity()).to_wire(),
        auth: List::default(),
    }
}

fn send(stream: &mut Stream, request: u64, message: Message) -> io::Result<()> {
    let mut frame = Vec::new();
    let envelope = Envelope { request: RequestId(request), ..Envelope::default() };
    encode(&mut frame, &envelope, &message, BodyStamp::NONE);
    match stream {
        Stream::Tcp(stream) => stream.write_all(&frame),
        Stream::Unix(stream) => stream.write_all(&frame),
    }
}

/// The next message; its body is read and forgotten.
fn next(reader: &mut FrameReader, stream: &mut Stream) -> io::Result<Message> {
    let other = |error: ReadError| io::Error::other(error);
    let mut source = |slices: &mut [IoSliceMut<'_>]| stream.read(slices);
    let (header, message) = match reader.poll(&mut source).map_err(other)? {
        Poll::Frame(header, message) => (header, message),
        Poll::Pending => return Err(io::ErrorKind::TimedOut.into()),
        Poll::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
    };
    if header.body_bytes > 0 && reader.skip_body(&mut source).map_err(other)? == BodyPoll::Pending {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(message)
}
