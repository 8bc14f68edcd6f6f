//! The client's side of a connection: the token that it offers in its hello, and its answer to the
//! challenge of the server.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pushpull_common::error::Chain;
use pushpull_common::ids::TaskId;
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::{ChallengeAnswer, Hello};
use pushpull_common::protocol::{BodyStamp, Envelope, Message, ProtocolError, Refusal, encode};
use thiserror::Error;

use super::credentials::Credentials;
use super::everywhere::in_effect;
use super::handshake::{ChannelBinding, ClientHandshake, UnprovenServer};
use super::random;
use crate::{FrameStream, Stream};

/// The proof of a client on one connection.
#[derive(Debug, Default)]
pub struct ClientProof {
    credentials: Option<Credentials>,
    binding: ChannelBinding,
    /// The offer that the server has not answered.
    pending: Option<ClientHandshake>,
}

/// The reason why a client ends a connection instead of proving who it is.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProofError {
    /// The server does not know the secret.
    #[error(transparent)]
    UnprovenServer(#[from] UnprovenServer),
    /// The server has not asked for the proof that it was offered, so nobody knows who it is.
    #[error(
        "the server has answered {found} to the offer of the access token {token}, not a challenge"
    )]
    NotChallenged {
        /// The name of the token.
        token: String,
        /// The name of the message that has arrived.
        found: &'static str,
    },
    /// The server asks for the proof of a token that it was not offered.
    #[error("the server asks for the proof of an access token, and was offered none")]
    NotOffered,
    /// The server refuses the client.
    #[error("{refusal}")]
    Refused {
        /// The reason.
        refusal: Refusal,
    },
    /// The connection has ended, or something else has arrived.
    #[error("the server has not answered the hello")]
    Read(#[from] ReadError),
    /// The hello was not sent, or there are no random bytes.
    #[error("cannot say hello")]
    Send(#[from] io::Error),
}

impl ClientProof {
    /// Creates the proof of a connection over this stream.
    pub fn new(credentials: Option<&Credentials>, stream: &Stream) -> ClientProof {
        let binding = stream.tls().and_then(|tls| tls.binding());
        ClientProof { credentials: in_effect(credentials), binding, pending: None }
    }

    /// Offers a token in the hello that will be sent in this envelope, if there is a token for its
    /// role and its task.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub fn offer(&mut self, envelope: &Envelope, hello: &mut Hello) -> io::Result<()> {
        let task = TaskId::new(hello.job.as_str(), hello.task);
        let credentials = self.credentials.as_ref();
        let own = credentials.and_then(|credentials| credentials.own_token(hello.role, &task));
        let Some(token) = own else { return Ok(()) };
        hello.auth = Some(ClientHandshake::offer(&token, random()?).into());
        let mut frame = Vec::new();
        encode(&mut frame, envelope, &hello.clone().into(), BodyStamp::NONE);
        self.pending = Some(ClientHandshake::new(token, &frame, self.binding));
        Ok(())
    }

    /// Returns whether the server must answer an offer.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Takes a message of the server: returns the answer to its challenge, or nothing if the message
    /// is another one, which is for the caller.
    ///
    /// # Errors
    /// Those of a server that does not prove who it is.
    pub fn take(&mut self, message: &Message) -> Result<Option<ChallengeAnswer>, ProofError> {
        match (self.pending.take(), message) {
            (None, Message::Challenge(_)) => Err(ProofError::NotOffered),
            (None, _) | (Some(_), Message::Refused(_)) => Ok(None),
            (Some(handshake), Message::Challenge(challenge)) => {
                Ok(Some(handshake.answer(challenge)?))
            }
            (Some(handshake), other) => Err(ProofError::NotChallenged {
                token: handshake.token().to_owned(),
                found: other.name(),
            }),
        }
    }
}

/// Says hello over a new connection, and proves who the client is if it has a token. The answer to
/// the hello comes afterwards.
///
/// # Errors
/// Every [`ProofError`].
pub async fn say_hello(
    frames: &mut FrameStream,
    credentials: Option<&Credentials>,
    envelope: Envelope,
    mut hello: Hello,
) -> Result<(), ProofError> {
    let mut proof = ClientProof::new(credentials, frames.stream());
    proof.offer(&envelope, &mut hello)?;
    let mut frame = Vec::new();
    encode(&mut frame, &envelope, &hello.into(), BodyStamp::NONE);
    frames.send(&frame).await?;
    if !proof.is_pending() {
        return Ok(());
    }
    let (_, message) = frames.next().await?;
    let answer = match (proof.take(&message)?, message) {
        (Some(answer), _) => answer,
        (None, Message::Refused(refused)) => {
            return Err(ProofError::Refused { refusal: refused.refusal });
        }
        (None, other) => {
            let (found, when) = (other.name(), "instead of a challenge");
            return Err(ReadError::from(ProtocolError::Unexpected { found, when }).into());
        }
    };
    frame.clear();
    encode(&mut frame, &envelope, &answer.into(), BodyStamp::NONE);
    Ok(frames.send(&frame).await?)
}

/// The proof of a client on a connection whose frames are queued and taken by others.
#[derive(Debug, Default)]
pub struct QueuedProof {
    /// Whether nothing is to be proved, or all is.
    is_settled: AtomicBool,
    state: Mutex<QueuedProofState>,
}

#[derive(Debug, Default)]
struct QueuedProofState {
    proof: ClientProof,
    /// The envelope of the hello.
    envelope: Envelope,
    failure: Option<ProofError>,
}

/// The next step after a message that has arrived.
#[derive(Debug)]
pub enum ProofStep {
    /// It is for the others.
    Pass,
    /// It is answered with this message, in the envelope of the hello.
    Answer(Envelope, ChallengeAnswer),
    /// The connection ends: [`QueuedProof::failure`] says why.
    End,
}

impl QueuedProof {
    /// Begins the connection over this stream. Until then nothing is proved.
    pub fn begin(&self, credentials: Option<&Credentials>, stream: &Stream) {
        let proof = ClientProof::new(credentials, stream);
        self.is_settled.store(proof.credentials.is_none(), Ordering::Relaxed);
        self.state().proof = proof;
    }

    /// Returns the message to send instead of this one: the hello that offers a token.
    pub fn replaced(&self, envelope: &Envelope, message: &Message) -> Option<Message> {
        let Message::Hello(hello) = message else { return None };
        let mut state = self.state();
        let mut hello = hello.clone();
        state.envelope = *envelope;
        if let Err(error) = state.proof.offer(envelope, &mut hello) {
            state.failure = Some(error.into());
        }
        let is_pending = state.proof.is_pending();
        self.is_settled.store(!is_pending && state.failure.is_none(), Ordering::Relaxed);
        is_pending.then(|| hello.into())
    }

    /// Takes a message that has arrived.
    pub fn take(&self, message: &Message) -> ProofStep {
        if self.is_settled.load(Ordering::Relaxed) {
            return ProofStep::Pass;
        }
        let mut state = self.state();
        if state.failure.is_some() {
            return ProofStep::End;
        }
        match state.proof.take(message) {
            Ok(answer) => {
                self.is_settled.store(true, Ordering::Relaxed);
                let answer = answer.map(|answer| ProofStep::Answer(state.envelope, answer));
                answer.unwrap_or(ProofStep::Pass)
            }
            Err(error) => {
                state.failure = Some(error);
                ProofStep::End
            }
        }
    }

    /// Returns why the connection ends, if it does.
    pub fn failure(&self) -> Option<String> {
        self.state().failure.as_ref().map(|error| Chain(error).to_string())
    }

    /// Returns whether the connection ends.
    pub fn has_failed(&self) -> bool {
        !self.is_settled.load(Ordering::Relaxed) && self.state().failure.is_some()
    }

    fn state(&self) -> MutexGuard<'_, QueuedProofState> {
        // It is valid after each step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
