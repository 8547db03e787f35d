#!/bin/sh
# Creates the credentials of compose.yaml's services: credentials.sh [FOLDER]
# FOLDER/SERVICE, a volume of the service alone, gets its own token and the public key. FOLDER/key keeps the private key,
# which no service gets. A later run keeps the key and replaces the tokens, which are valid for a year.
set -eu
folder=${1:-/credentials}

# keygen writes the public key last.
if [ ! -e "$folder/key/token_keys.pem" ]; then
  rm -f "$folder/key/token_key.pem"
  headrace token keygen "$folder/key"
fi

create() {
  service=$1
  shift
  mkdir -p "$folder/$service"
  rm -f "$folder/$service/token.new"
  headrace token create "$service" "$@" --key "$folder/key/token_key.pem" --output "$folder/$service/token.new"
  cp "$folder/key/token_keys.pem" "$folder/$service/token_keys.new"
  # Services read the files while they are replaced.
  mv "$folder/$service/token_keys.new" "$folder/$service/token_keys.pem"
  mv "$folder/$service/token.new" "$folder/$service/token"
}

create registry
create router
create prefill --name prefill-0
create decode --name decode-0
create planner
create operator
