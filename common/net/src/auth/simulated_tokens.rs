//! [`SimulatedTokens`]: the proofs of a simulated cluster, without a file, a socket or chance.

use std::sync::Arc;

use pushpull_common::access::Principal;
use pushpull_common::ids::TaskId;
use pushpull_common::protocol::message::{Challenge, ChallengeAnswer, Hello};
use pushpull_common::protocol::{BodyStamp, Envelope, Header, encode};

use super::handshake::{ClientHandshake, Nonce, ServerHandshake};
use super::secret::Secret;
use super::token_file::AccessList;

/// The access tokens of a simulated cluster. Both sides of a connection prove with them what those of
/// a real one do. Nonces are counted, so that a run is always the same.
#[derive(Clone, Debug)]
pub struct SimulatedTokens {
    tokens: Arc<(AccessList, Secret)>,
    /// Distinguishes the nonces of this process.
    process: u64,
    nonces: u64,
}

impl SimulatedTokens {
    /// Reads the lines of a file of tokens.
    ///
    /// # Panics
    /// If they have a fault.
    pub fn new(lines: &str) -> SimulatedTokens {
        let list = AccessList::parse(lines).expect("the lines have no fault");
        let decoys = Secret::from_random(&[7; 32]).expect("there is memory for a secret");
        SimulatedTokens { tokens: Arc::new((list, decoys)), process: 0, nonces: 0 }
    }

    /// Returns the tokens for a process of this number.
    pub fn of_process(&self, process: u64) -> SimulatedTokens {
        SimulatedTokens { tokens: self.tokens.clone(), process, nonces: 0 }
    }

    /// Offers the token of a client in its hello, which it sends in this envelope.
    ///
    /// # Panics
    /// If the client has none for its role and its task.
    pub fn offer(&mut self, envelope: &Envelope, hello: &mut Hello) -> ClientHandshake {
        let task = TaskId::new(hello.job.as_str(), hello.task);
        let own = self.tokens.0.own_token(hello.role, &task).cloned();
        let token = own.unwrap_or_else(|| panic!("{task} has no token as {:?}", hello.role));
        hello.auth = Some(ClientHandshake::offer(&token, self.nonce()).into());
        ClientHandshake::new(token, &frame_of(envelope, hello), None)
    }

    /// Challenges a client that has said hello; `None` if it offers no token.
    pub fn challenge(
        &mut self,
        header: &Header,
        hello: &mut Hello,
    ) -> Option<(ServerHandshake, Challenge)> {
        let Header { request, restore_epoch, step, sequence, deadline_ms, .. } = *header;
        let envelope = Envelope { request, restore_epoch, step, sequence, deadline_ms };
        let bytes = frame_of(&envelope, hello);
        let offer = hello.auth.take()?;
        let nonce = self.nonce();
        let (list, decoys) = &*self.tokens;
        let challenged = ServerHandshake::challenge(list, decoys, &offer, &bytes, None, nonce);
        Some(challenged.expect("there is memory for a secret"))
    }

    fn nonce(&mut self) -> Nonce {
        self.nonces += 1;
        let mut nonce = [0; 32];
        nonce[..8].copy_from_slice(&self.process.to_le_bytes());
        nonce[8..16].copy_from_slice(&self.nonces.to_le_bytes());
        nonce
    }
}

/// Returns who has answered a challenge, if that may connect as its hello says.
pub fn principal_of(
    handshake: &ServerHandshake,
    answer: &ChallengeAnswer,
    hello: &Hello,
) -> Option<Arc<Principal>> {
    let principal = &handshake.check(answer)?.principal;
    let task = TaskId::new(hello.job.as_str(), hello.task);
    principal.rights.permit(hello.role, &task).then(|| principal.clone())
}

fn frame_of(envelope: &Envelope, hello: &Hello) -> Vec<u8> {
    let mut frame = Vec::new();
    encode(&mut frame, envelope, &hello.clone().into(), BodyStamp::NONE);
    frame
}
