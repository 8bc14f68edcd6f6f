//! A protocol client without a session, which detects when a server answers again without delay.
//!
//! A worker pauses between attempts to connect, so that many workers do not return at the same
//! instant. That pause is not the server's. The probe therefore speaks the protocol itself, and its
//! callers retry without that pause.

use std::io::{self, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use pushpull::ClusterSpec;
use pushpull::cluster::ShardId;
use pushpull::protocol::Identity;
use pushpull::protocol::decode::ReadError;
use pushpull::protocol::message::{BodyCrc, Hello, Pull, Role, Selection};
use pushpull::protocol::wire::Text;
use pushpull::protocol::{
    BodyPoll, BodyStamp, Envelope, FrameReader, Message, Poll, encode, version,
};
use pushpull::protocol::{ClientEpoch, GlobalStep, Incarnation, RequestId, RestoreEpoch};

/// Limit on each read, for a server that is alive but does not answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Makes one attempt. Returns whether the shard welcomed a reader and answered its pull completely.
pub(crate) fn answers(
    cluster: &ClusterSpec,
    shard: ShardId,
    selection: Selection,
) -> io::Result<bool> {
    let Some(mut line) = ProbeConnection::open(cluster, shard, Role::Reader {})? else {
        return Ok(false);
    };
    line.send(Pull { selection }.into(), &[])?;
    loop {
        match line.next()? {
            Message::Pulled(pulled) if pulled.last => return Ok(true),
            Message::Pulled(_) => {}
            _ => return Ok(false),
        }
    }
}

/// A connection to a shard, after the welcome.
pub(crate) struct ProbeConnection {
    stream: ProbeStream,
    reader: FrameReader,
    requests: u64,
}

impl ProbeConnection {
    /// Connects in this role. Returns `None` if the shard refuses.
    pub(crate) fn open(
        cluster: &ClusterSpec,
        shard: ShardId,
        role: Role,
    ) -> io::Result<Option<ProbeConnection>> {
        ProbeConnection::greet(cluster, &Hello { role, ..hello(cluster, shard) }, TIMEOUT)
    }

    /// Connects to the shard that `hello` names. Returns `None` if the shard refuses. `timeout`
    /// limits each read.
    pub(crate) fn greet(
        cluster: &ClusterSpec,
        hello: &Hello,
        timeout: Duration,
    ) -> io::Result<Option<ProbeConnection>> {
        let address = cluster.task_address("ps", hello.shard.task).map_err(io::Error::other)?;
        let stream = match address.strip_prefix("unix:") {
            Some(path) => ProbeStream::Unix(UnixStream::connect(path)?),
            None => ProbeStream::Tcp(TcpStream::connect(address)?),
        };
        stream.limit(timeout)?;
        let mut line = ProbeConnection { stream, reader: FrameReader::new(), requests: 0 };
        line.send(hello.clone().into(), &[])?;
        if !matches!(line.next()?, Message::Welcome(_)) {
            return Ok(None);
        }
        line.reader.open();
        Ok(Some(line))
    }

    /// Sends a message in the default envelope.
    pub(crate) fn send(&mut self, message: Message, body: &[u8]) -> io::Result<()> {
        self.send_in(Envelope::default(), &message, body)
    }

    /// Sends a message in this envelope, under the next request id.
    pub(crate) fn send_in(
        &mut self,
        envelope: Envelope,
        message: &Message,
        body: &[u8],
    ) -> io::Result<()> {
        self.requests += 1;
        let envelope = Envelope { request: RequestId(self.requests), ..envelope };
        let mut frame = Vec::new();
        encode(&mut frame, &envelope, message, BodyStamp::plain(body.len() as u64));
        frame.extend_from_slice(body);
        match &mut self.stream {
            ProbeStream::Tcp(stream) => stream.write_all(&frame),
            ProbeStream::Unix(stream) => stream.write_all(&frame),
        }
    }

    /// Reads the next message and discards its body.
    pub(crate) fn next(&mut self) -> io::Result<Message> {
        let reader = &mut self.reader;
        let stream = &mut self.stream;
        let other = |error: ReadError| io::Error::other(error);
        let mut source = |slices: &mut [IoSliceMut<'_>]| stream.read(slices);
        let (header, message) = match reader.poll(&mut source).map_err(other)? {
            Poll::Frame(header, message) => (header, message),
            Poll::Pending => return Err(io::ErrorKind::TimedOut.into()),
            Poll::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        if header.body_bytes > 0
            && reader.skip_body(&mut source).map_err(other)? == BodyPoll::Pending
        {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(message)
    }
}

enum ProbeStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl ProbeStream {
    fn limit(&self, timeout: Duration) -> io::Result<()> {
        match self {
            ProbeStream::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(timeout))
            }
            ProbeStream::Unix(stream) => stream.set_read_timeout(Some(timeout)),
        }
    }

    fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            ProbeStream::Tcp(stream) => stream.read_vectored(slices),
            ProbeStream::Unix(stream) => stream.read_vectored(slices),
        }
    }
}

/// Returns the hello of a reader.
pub(crate) fn hello(cluster: &ClusterSpec, shard: ShardId) -> Hello {
    Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role: Role::Reader {},
        // The task must be one of the cluster's, as for a member.
        job: Text::clipped("worker"),
        task: 0,
        shard,
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_arena: 0,
        seen_step: GlobalStep(0),
        catalogue: None,
        body_crc: BodyCrc::Off {},
        identity: Identity::new().with("ps", cluster.ps_identity()).to_wire(),
        auth: None,
        features: Default::default(),
    }
}
