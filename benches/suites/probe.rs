//! A protocol client without a session, which detects when a server answers again without delay.
//!
//! A worker pauses between attempts to connect, so that many workers do not return at the same
//! instant. That pause is not the server's. The probe therefore speaks the protocol itself, and its
//! callers retry without that pause.

use std::io;
use std::time::Duration;

use pushpull::ClusterSpec;
use pushpull::cluster::ShardId;
use pushpull::error::Chain;
use pushpull::protocol::Identity;
use pushpull::protocol::decode::ReadError;
use pushpull::protocol::message::{BodyCrc, Hello, Pull, Role, Selection};
use pushpull::protocol::wire::Text;
use pushpull::protocol::{BodyStamp, Envelope, FrameReader, Message, encode, version};
use pushpull::protocol::{ClientEpoch, GlobalStep, Incarnation, RequestId, RestoreEpoch};
use pushpull_net::auth::{ProofError, say_hello};
use pushpull_net::{Connector, FrameStream};
use tokio::runtime::{Builder, Runtime};

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
    frames: FrameStream,
    /// Limits each read.
    timeout: Duration,
    requests: u64,
    /// Dropped last: the stream is registered with it.
    runtime: Runtime,
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
        let connector = Connector::new(address);
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let greeting = async {
            let connected = connector.connect(timeout).await;
            let connected = connected.map_err(|error| io::Error::other(Chain(&error).to_string()));
            let mut frames = FrameStream::new(connected?.stream, FrameReader::new());
            let envelope = Envelope { request: RequestId(1), ..Envelope::default() };
            let hello = hello.clone();
            match say_hello(&mut frames, connector.own_credentials(), envelope, hello).await {
                Ok(()) => {}
                Err(ProofError::Refused { .. }) => return Ok(None),
                Err(error) => return Err(io::Error::other(Chain(&error).to_string())),
            }
            let (_, answer) = frames.next().await.map_err(io::Error::other)?;
            Ok(matches!(answer, Message::Welcome(_)).then_some(frames))
        };
        let greeted = runtime.block_on(async { tokio::time::timeout(timeout, greeting).await });
        let Some(mut frames) = greeted.map_err(|_| io::ErrorKind::TimedOut)?? else {
            return Ok(None);
        };
        frames.open();
        Ok(Some(ProbeConnection { frames, timeout, requests: 1, runtime }))
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
        self.runtime.block_on(self.frames.send(&frame))
    }

    /// Reads the next message and discards its body.
    pub(crate) fn next(&mut self) -> io::Result<Message> {
        let next = async {
            let (header, message) = self.frames.next().await?;
            if header.body_bytes > 0 {
                self.frames.body(&mut vec![0; header.body_bytes as usize]).await?;
            }
            Ok(message)
        };
        let timeout = self.timeout;
        let next = self.runtime.block_on(async { tokio::time::timeout(timeout, next).await });
        next.map_err(|_| io::ErrorKind::TimedOut)?.map_err(|error| match error {
            ReadError::Io(error) => error,
            error => io::Error::other(error),
        })
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
