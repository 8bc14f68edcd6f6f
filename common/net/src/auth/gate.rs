//! Who may connect to a server, and the exchange by which a client proves who it is.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::access::{AccessEvent, Principal};
use pushpull_common::error::Chain;
use pushpull_common::ids::TaskId;
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::Hello;
use pushpull_common::protocol::{BodyStamp, Envelope, Header, Message, ProtocolError, encode};

use super::credentials::{Credentials, Loaded};
use super::handshake::ServerHandshake;
use super::places::{ConnectionPlace, NoPlace};
use super::random;
use super::token_file::AccessToken;
#[cfg(feature = "tls")]
use super::token_file::owner_of;
use crate::FrameStream;

/// Who a peer has proved to be, and by what.
#[derive(Debug)]
pub struct ProvenPeer {
    /// Who it is.
    pub principal: Arc<Principal>,
    proof: Proof,
    /// The credentials that have let it in.
    credentials: Credentials,
    /// Its place among the connections of its principal, while this is kept.
    _place: ConnectionPlace,
}

/// What a peer has proved itself with.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Proof {
    /// It knows the secret of this token.
    Token(Arc<AccessToken>),
    /// It has shown a certificate with these names.
    #[cfg(feature = "tls")]
    Certificate(Vec<String>),
}

/// The reason why a peer that has said hello does not get in.
#[derive(Debug)]
pub(crate) enum NotProven {
    /// It has not proved that it may, for this reason.
    Denied(String),
    /// It has proved who it is, and has as many connections as it may have.
    Full(NoPlace),
    /// It has sent something else, or the connection has ended.
    Read(ReadError),
}

impl From<io::Error> for NotProven {
    fn from(error: io::Error) -> NotProven {
        NotProven::Read(error.into())
    }
}

impl From<ReadError> for NotProven {
    fn from(error: ReadError) -> NotProven {
        NotProven::Read(error)
    }
}

/// Has a peer that has said hello prove who it is. `None` if the server asks nobody for a proof.
///
/// A same-host peer of the same user needs none: it could read the memory of this process. One of
/// another user does. The offer of a token stays in the hello if it was not taken.
pub(crate) async fn prove(
    credentials: Option<&Credentials>,
    frames: &mut FrameStream,
    origin: PeerOrigin,
    header: &Header,
    hello: &mut Hello,
) -> Result<Option<ProvenPeer>, NotProven> {
    let task = TaskId::new(hello.job.as_str(), hello.task);
    if let Some(credentials) = credentials {
        let loaded = credentials.fresh();
        if let Some((principal, proof)) = proof(credentials, &loaded, frames, header, hello).await?
        {
            let Principal { name, rights } = &*principal;
            if !rights.permit(hello.role, &task) {
                let cause = format!("{name} may not be this task in this role");
                return Err(NotProven::Denied(cause));
            }
            let _place = credentials.places().take(&principal).map_err(NotProven::Full)?;
            let credentials = credentials.clone();
            return Ok(Some(ProvenPeer { principal, proof, credentials, _place }));
        }
    }
    let is_required = match origin {
        PeerOrigin::Unix { same_user } => !same_user && frames.stream().is_of_another_user(),
        _ => credentials.is_some_and(Credentials::identify_clients),
    };
    match is_required {
        false => Ok(None),
        true => Err(NotProven::Denied("it has neither a token nor a certificate".to_owned())),
    }
}

/// Returns who the peer is by the token that it offers, or by its certificate.
async fn proof(
    credentials: &Credentials,
    loaded: &Loaded,
    frames: &mut FrameStream,
    header: &Header,
    hello: &mut Hello,
) -> Result<Option<(Arc<Principal>, Proof)>, NotProven> {
    let Some((offer, list)) = hello.auth.as_ref().zip(loaded.list.as_ref()) else {
        return Ok(by_certificate(frames, loaded));
    };
    let binding = frames.stream().tls().and_then(|tls| tls.binding());
    let name = offer.token.as_str().to_owned();
    let head = frames.head(header);
    let challenged =
        ServerHandshake::challenge(list, credentials.decoys(), offer, head, binding, random()?);
    let (handshake, challenge) =
        challenged.map_err(|error| io::Error::other(Chain(&error).to_string()))?;
    hello.auth = None;
    let envelope = Envelope { request: header.request, ..Envelope::default() };
    let mut frame = Vec::new();
    encode(&mut frame, &envelope, &challenge.into(), BodyStamp::plain(0));
    frames.send(&frame).await?;
    let answer = match frames.next().await? {
        (_, Message::ChallengeAnswer(answer)) => answer,
        (_, message) => {
            let (found, when) = (message.name(), "instead of the answer to a challenge");
            return Err(NotProven::Read(ProtocolError::Unexpected { found, when }.into()));
        }
    };
    match handshake.check(&answer) {
        Some(token) => {
            let principal = token.principal.clone();
            Ok(Some((principal, Proof::Token(token.clone()))))
        }
        None => Err(NotProven::Denied(format!(
            "it does not know the secret of a token of the name {}",
            name.escape_debug()
        ))),
    }
}

/// Returns who the peer is by its certificate, if it has shown one.
#[cfg(feature = "tls")]
fn by_certificate(frames: &FrameStream, loaded: &Loaded) -> Option<(Arc<Principal>, Proof)> {
    let names = frames.stream().tls()?.peer_names()?;
    let principal = Arc::new(owner_of(&names, loaded.list.as_deref())?);
    Some((principal, Proof::Certificate(names)))
}

#[cfg(not(feature = "tls"))]
fn by_certificate(_: &FrameStream, _: &Loaded) -> Option<(Arc<Principal>, Proof)> {
    None
}

/// The time between two looks at whether a peer may stay connected.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

impl ProvenPeer {
    /// Returns once the credentials that have let this peer in let it in no more.
    pub async fn revoked(&self) -> AccessEvent {
        while self.is_admitted() {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        AccessEvent::Revoked { principal: self.principal.name.clone() }
    }

    /// Returns whether what has let this peer in still does.
    pub fn is_admitted(&self) -> bool {
        let loaded = self.credentials.current();
        let list = loaded.list.as_deref();
        match &self.proof {
            Proof::Token(token) => {
                list.and_then(|list| list.token(&token.name)).is_some_and(|now| now == token)
            }
            #[cfg(feature = "tls")]
            Proof::Certificate(names) => {
                owner_of(names, list).is_some_and(|now| now == *self.principal)
            }
        }
    }
}
