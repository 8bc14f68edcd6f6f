//! A ps task as a client of shards: the step owner's task has each shard write its part of a
//! checkpoint.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use pushpull_checkpoint::CheckpointFault;
use pushpull_common::error::Chain;
use pushpull_common::ids::{ClientEpoch, RequestId, RestoreEpoch, ShardId};
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message;
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{
    BodyStamp, Envelope, Features, FrameReader, Header, Message, Refusal, encode_for,
};
use pushpull_net::auth::{ProofError, say_hello};
use pushpull_net::{ConnectError, Connected, Connector, FrameStream};

use crate::peer_hello::PeerHello;

/// How long a shard may take to write its part before the save fails.
const SHARD_SAVE_TIMEOUT: Duration = Duration::from_secs(3600);

/// The reason why a shard has not welcomed this task.
#[derive(Clone, Debug)]
pub(super) enum NoWelcome {
    /// The shard refuses this task, until one of the two is corrected or has another state.
    Refused(Refusal),
    /// The shard has not answered, or has answered something else.
    Lost(String),
}

impl fmt::Display for NoWelcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoWelcome::Refused(refusal) => write!(f, "it refuses this task: {refusal}"),
            NoWelcome::Lost(cause) => f.write_str(cause),
        }
    }
}

/// Has a shard write its part of a checkpoint and returns its entry for the manifest. The shard
/// refuses if its restore epoch is another.
pub(super) async fn save_shard(
    peer_hello: &PeerHello,
    address: &str,
    shard: ShardId,
    checkpoint: &str,
    epoch: RestoreEpoch,
) -> Result<Vec<u8>, CheckpointFault> {
    let saving = async {
        let connector = peer_hello.connector(address, shard);
        let connected = PeerConnection::connect(&connector, Connector::LIMIT).await;
        let unavailable = |cause: String| CheckpointFault::Unavailable(cause);
        let mut connection =
            connected.map_err(|error| unavailable(format!("cannot connect: {}", Chain(&error))))?;
        let greeted = connection.greet(peer_hello, shard, ClientEpoch(0)).await;
        greeted.map_err(|error| unavailable(error.to_string()))?;
        let save = message::SaveShard { name: Text::clipped(checkpoint) };
        let answer = connection.ask(save.into(), epoch).await;
        match answer.map_err(CheckpointFault::Unavailable)? {
            (Message::ShardSaved(_), body) => Ok(body),
            (Message::Refused(refused), _) => {
                let cause = refused.refusal.to_string();
                Err(CheckpointFault::of_part(&refused.refusal, cause))
            }
            (message, _) => Err(CheckpointFault::Unavailable(unexpected(message))),
        }
    };
    let saved = tokio::time::timeout(SHARD_SAVE_TIMEOUT, saving).await;
    let late =
        || CheckpointFault::Unavailable(format!("it took longer than {SHARD_SAVE_TIMEOUT:?}"));
    let saved = saved.unwrap_or_else(|_| Err(late()));
    let at = |cause| format!("{shard} at {address} has not saved its part: {cause}");
    saved.map_err(|fault| fault.map_cause(at))
}

fn unexpected(message: Message) -> String {
    match message {
        Message::Refused(refused) => refused.refusal.to_string(),
        other => format!("it answered with {}", other.name()),
    }
}

/// A connection to a shard, either with one request outstanding or with independent frames in both
/// directions.
pub(super) struct PeerConnection {
    frames: FrameStream,
    requests: u64,
    address: Option<SocketAddr>,
}

impl PeerConnection {
    pub(super) async fn connect(
        connector: &Connector,
        limit: Duration,
    ) -> Result<PeerConnection, ConnectError> {
        let Connected { stream, address } = connector.connect(limit).await?;
        let frames = FrameStream::new(stream, FrameReader::new());
        Ok(PeerConnection { frames, requests: 0, address })
    }

    /// The internet address that has accepted.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Sends a request and waits for its answer.
    async fn ask(
        &mut self,
        message: Message,
        restore_epoch: RestoreEpoch,
    ) -> Result<(Message, Vec<u8>), String> {
        self.requests += 1;
        let request = RequestId(self.requests);
        let envelope = Envelope { request, restore_epoch, ..Envelope::default() };
        let mut frame = Vec::new();
        encode_for(self.features(), &mut frame, &envelope, &message, BodyStamp::plain(0));
        self.send(&frame).await.map_err(|error| error.to_string())?;
        self.answer().await.map_err(|error| Chain(&error).to_string())
    }

    /// Sends encoded frames.
    pub(super) async fn send(&mut self, frames: &[u8]) -> io::Result<()> {
        self.frames.send(frames).await
    }

    /// Returns the features that are agreed with the shard.
    pub(super) fn features(&self) -> Features {
        self.frames.features()
    }

    /// Says hello to a shard and waits for its welcome.
    pub(super) async fn greet(
        &mut self,
        peer_hello: &PeerHello,
        shard: ShardId,
        newest: ClientEpoch,
    ) -> Result<ClientEpoch, NoWelcome> {
        self.frames.set_features(peer_hello.features);
        let hello = peer_hello.hello(shard, newest);
        self.requests += 1;
        let envelope = Envelope { request: RequestId(self.requests), ..Envelope::default() };
        let credentials = peer_hello.credentials.as_ref();
        match say_hello(&mut self.frames, credentials, envelope, hello).await {
            Ok(()) => {}
            Err(ProofError::Refused { refusal }) => return Err(NoWelcome::Refused(refusal)),
            Err(error) => return Err(NoWelcome::Lost(Chain(&error).to_string())),
        }
        let answer = self.answer().await;
        match answer.map_err(|error| NoWelcome::Lost(Chain(&error).to_string()))? {
            (Message::Welcome(welcome), _) => {
                self.frames.open();
                Ok(welcome.client_epoch)
            }
            (Message::Refused(refused), _) => Err(NoWelcome::Refused(refused.refusal)),
            (message, _) => Err(NoWelcome::Lost(unexpected(message))),
        }
    }

    /// Receives the next frame, which must have no body. Cancel-safe: a partly read frame is kept.
    pub(super) async fn next(&mut self) -> Result<(Header, Message), ReadError> {
        match self.frames.next().await? {
            (header, message) if header.body_bytes == 0 => Ok((header, message)),
            _ => Err(io::Error::from(io::ErrorKind::InvalidData).into()),
        }
    }

    async fn answer(&mut self) -> Result<(Message, Vec<u8>), ReadError> {
        let (header, message) = self.frames.next().await?;
        // The reader has checked the length against the largest body of this kind.
        let mut body = vec![0; header.body_bytes as usize];
        if !body.is_empty() {
            self.frames.body(&mut body).await?;
        }
        Ok((message, body))
    }
}
