//! The proofs by which two sides of a connection show each other that they know the secret of an
//! access token, without sending it. Pure: random bytes are arguments.

use std::fmt;
use std::sync::Arc;

use pushpull_common::protocol::message::{AuthOffer, Challenge, ChallengeAnswer};
use pushpull_common::protocol::wire::Text;
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::secret::{Proof, Secret};
use super::token_file::{AccessList, AccessToken};

/// Bytes that only the two ends of one TLS connection know. Absent without TLS.
pub type ChannelBinding = Option<[u8; 32]>;

/// Random bytes, new for each connection.
pub type Nonce = [u8; 32];

/// What a client proves with: its token, and the hello that offers it.
#[derive(Debug)]
pub struct ClientHandshake {
    token: Arc<AccessToken>,
    transcript: Transcript,
}

impl ClientHandshake {
    /// Returns the offer of a token, which the hello has.
    pub fn offer(token: &AccessToken, nonce: Nonce) -> AuthOffer {
        AuthOffer { token: Text::clipped(&token.name), nonce }
    }

    /// Begins with the bytes of the hello that offers the token: its header and its meta.
    pub fn new(token: Arc<AccessToken>, hello: &[u8], binding: ChannelBinding) -> ClientHandshake {
        ClientHandshake { token, transcript: Transcript::new(hello, binding) }
    }

    /// Returns the name of the token.
    pub fn token(&self) -> &str {
        &self.token.name
    }

    /// Checks the proof of a server, and returns that of this client.
    ///
    /// # Errors
    /// [`UnprovenServer`].
    pub fn answer(&self, challenge: &Challenge) -> Result<ChallengeAnswer, UnprovenServer> {
        let Challenge { nonce, proof } = challenge;
        let secret = &self.token.secret;
        match self.transcript.verify(secret, Side::Server, nonce, proof) {
            true => {
                Ok(ChallengeAnswer { proof: self.transcript.prove(secret, Side::Client, nonce) })
            }
            false => Err(UnprovenServer { token: self.token.name.clone() }),
        }
    }
}

/// The server does not know the secret of the client's access token: it has another one under this
/// name or none, or it is not the server that it claims to be.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("the server does not prove that it knows the access token {token}")]
pub struct UnprovenServer {
    /// The name of the token.
    pub token: String,
}

/// What a server expects of a client that it has challenged.
pub struct ServerHandshake {
    /// `None` if no token has the name that the client offers. Its proof is checked all the same.
    token: Option<Arc<AccessToken>>,
    decoy: Secret,
    nonce: Nonce,
    transcript: Transcript,
}

impl ServerHandshake {
    /// Challenges a client that offers a token in a hello of these bytes.
    ///
    /// A client that does not know the secret cannot tell an unknown name from a known one: both
    /// get a proof that it cannot check. `decoys` are random bytes, the same for all connections of
    /// a server.
    pub fn challenge(
        list: &AccessList,
        decoys: &Secret,
        offer: &AuthOffer,
        hello: &[u8],
        binding: ChannelBinding,
        nonce: Nonce,
    ) -> Result<(ServerHandshake, Challenge), super::SecretError> {
        let name = offer.token.as_str();
        let decoy = Secret::from_random(&decoys.authenticate(&[name.as_bytes()]))?;
        let token = list.token(name).cloned();
        let transcript = Transcript::new(hello, binding);
        let handshake = ServerHandshake { token, decoy, nonce, transcript };
        let proof = handshake.transcript.prove(handshake.secret(), Side::Server, &nonce);
        Ok((handshake, Challenge { nonce, proof }))
    }

    /// Checks the answer of the client. `None` if it does not prove that it knows the token.
    pub fn check(&self, answer: &ChallengeAnswer) -> Option<&Arc<AccessToken>> {
        let proven =
            self.transcript.verify(self.secret(), Side::Client, &self.nonce, &answer.proof);
        self.token.as_ref().filter(|_| proven)
    }

    fn secret(&self) -> &Secret {
        self.token.as_ref().map_or(&self.decoy, |token| &token.secret)
    }
}

impl fmt::Debug for ServerHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|token| &token.name);
        f.debug_struct("ServerHandshake").field("token", &token).finish_non_exhaustive()
    }
}

/// The side that proves. Its label keeps a proof from being sent back as that of the other.
#[derive(Clone, Copy)]
enum Side {
    Client,
    Server,
}

impl Side {
    fn label(self) -> &'static [u8] {
        match self {
            Side::Client => b"pushpull 1 client",
            Side::Server => b"pushpull 1 server",
        }
    }
}

/// What both sides have seen of the connection. The hello has the nonce of the client.
#[derive(Debug)]
struct Transcript {
    hello: [u8; 32],
    binding: [u8; 32],
}

impl Transcript {
    fn new(hello: &[u8], binding: ChannelBinding) -> Transcript {
        // No channel has a binding of zeros, but by chance.
        Transcript { hello: Sha256::digest(hello).into(), binding: binding.unwrap_or_default() }
    }

    fn prove(&self, secret: &Secret, side: Side, nonce: &Nonce) -> Proof {
        secret.authenticate(&[side.label(), &self.hello, nonce, &self.binding])
    }

    fn verify(&self, secret: &Secret, side: Side, nonce: &Nonce, proof: &Proof) -> bool {
        secret.verify(&[side.label(), &self.hello, nonce, &self.binding], proof)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list of tokens with these names. A token's secret is its name's letter, repeated.
    fn list(names: &[(&str, &str)]) -> AccessList {
        let line = |(name, digits): &(&str, &str)| {
            format!("token {name} {} roles=worker\n", digits.repeat(16))
        };
        AccessList::parse(&names.iter().map(line).collect::<String>()).unwrap()
    }

    fn decoys() -> Secret {
        Secret::from_random(&[9; 32]).unwrap()
    }

    const HELLO: &[u8] = b"a header and a meta";
    const BINDING: ChannelBinding = Some([5; 32]);

    /// A handshake between a client and a server that have these tokens.
    struct Meeting {
        client: ClientHandshake,
        server: ServerHandshake,
        challenge: Challenge,
    }

    fn meet(clients: (&str, &str), servers: &[(&str, &str)]) -> Meeting {
        let token = list(&[clients]).tokens()[0].clone();
        let offer = ClientHandshake::offer(&token, [1; 32]);
        let client = ClientHandshake::new(token, HELLO, BINDING);
        let (server, challenge) =
            ServerHandshake::challenge(&list(servers), &decoys(), &offer, HELLO, BINDING, [2; 32])
                .unwrap();
        Meeting { client, server, challenge }
    }

    #[test]
    fn both_sides_prove_that_they_know_the_token() {
        let Meeting { client, server, challenge } =
            meet(("b", "bb"), &[("a", "aa"), ("b", "bb"), ("c", "cc")]);
        let answer = client.answer(&challenge).unwrap();
        assert_eq!(server.check(&answer).unwrap().name, "b");
    }

    #[test]
    fn a_server_without_the_secret_is_found_before_the_client_proves_anything() {
        let unproven = Err(UnprovenServer { token: "b".to_owned() });
        for servers in [("b", "ab"), ("a", "bb")] {
            let Meeting { client, challenge, .. } = meet(("b", "bb"), &[servers]);
            assert_eq!(client.answer(&challenge), unproven, "{servers:?}");
        }
    }

    #[test]
    fn a_client_without_the_secret_is_nobody() {
        for name in ["a", "unknown"] {
            let Meeting { server, challenge, .. } = meet((name, "bb"), &[("a", "aa")]);
            // What it can make of what it has heard.
            for proof in [challenge.proof, challenge.nonce, [0; 32]] {
                assert_eq!(server.check(&ChallengeAnswer { proof }), None, "{name}");
            }
        }
    }

    #[test]
    fn an_unknown_name_is_answered_like_a_known_one() {
        let challenge = |name| meet((name, "bb"), &[("a", "aa")]).challenge;
        assert_eq!(challenge("unknown"), challenge("unknown"), "as if it had a secret");
        assert_ne!(challenge("unknown"), challenge("other"));
        assert_ne!(challenge("unknown").proof, [0; 32]);
    }

    #[test]
    fn a_proof_holds_for_one_hello_one_nonce_and_one_channel() {
        let servers = [("b", "bb")];
        let token = list(&servers).tokens()[0].clone();
        let offer = ClientHandshake::offer(&token, [1; 32]);
        let server = |hello: &[u8], binding, nonce| {
            let list = list(&servers);
            ServerHandshake::challenge(&list, &decoys(), &offer, hello, binding, nonce).unwrap()
        };
        let client = ClientHandshake::new(token.clone(), HELLO, BINDING);
        let (honest, challenge) = server(HELLO, BINDING, [2; 32]);
        let answer = client.answer(&challenge).unwrap();
        assert!(honest.check(&answer).is_some());
        let others = [
            server(b"another header and a meta", BINDING, [2; 32]),
            server(HELLO, None, [2; 32]),
            server(HELLO, Some([6; 32]), [2; 32]),
            server(HELLO, BINDING, [3; 32]),
        ];
        for (index, (other, its_challenge)) in others.iter().enumerate() {
            assert_eq!(other.check(&answer), None, "{index}: the answer is replayed");
            // Its nonce under the proof of another connection.
            let mixed = Challenge { nonce: its_challenge.nonce, proof: challenge.proof };
            let is_another = its_challenge.proof != challenge.proof;
            assert!(is_another, "{index}");
            let answered = client.answer(its_challenge).is_ok();
            assert_eq!(answered, index == 3, "{index}: only the nonce is the server's to choose");
            assert_eq!(client.answer(&mixed).is_ok(), index != 3, "{index}: the same nonce");
        }
    }
}
